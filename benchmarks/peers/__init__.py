"""What runs the other programs: one script a program, in an environment of its own, with its time and memory measured alike."""
