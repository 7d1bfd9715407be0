"""GPT-2 from scratch on our ops: model, data, loop, checkpoints that resume exactly."""
