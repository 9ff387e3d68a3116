"""The tool `rehearse`: a complete run on a shrunk model, before the real run is paid for."""
