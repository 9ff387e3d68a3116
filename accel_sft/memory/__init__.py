"""The one model of memory: what a run will need, for the engine and for `plan`."""
