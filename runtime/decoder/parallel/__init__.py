"""A model on several processes: tensor, context, expert and pipeline parallelism."""
