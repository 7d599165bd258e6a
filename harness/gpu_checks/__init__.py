"""What GPUs must do before a case is run on them, checked in processes of their own."""
