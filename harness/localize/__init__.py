"""Where two systems first part: operator by operator, on the step where their tensors first differ."""
