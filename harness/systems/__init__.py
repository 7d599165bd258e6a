"""Systems: objects that run training steps and report their tensors. Some are built in, others are written by users."""
