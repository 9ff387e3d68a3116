"""What stands beside training, each tool with its command. The engine imports none of them but the quick check."""
