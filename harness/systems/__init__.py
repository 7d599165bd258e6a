"""Systems: objects that run training steps and show their tensors. Some are built in, others are written by users."""
