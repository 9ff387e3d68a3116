"""The tool `how-much`: trains on growing parts of the rows, to forecast what more training rows would bring."""
