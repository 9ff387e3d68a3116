"""The tool `report`: makes one page from the files of runs and comparisons, without torch."""
