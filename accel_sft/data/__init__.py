"""From rows on a disk to token ids in an order of steps."""
