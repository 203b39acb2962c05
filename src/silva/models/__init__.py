"""What engines and the trainer share: loading and attention."""
