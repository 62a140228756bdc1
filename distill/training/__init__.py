"""The training loop: batches, optimizer, learning rate, teachers, and weights sharded over processes."""
