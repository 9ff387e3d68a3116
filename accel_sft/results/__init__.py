"""What is said of a run afterwards: its report, its model card, intervals and labels. No torch."""
