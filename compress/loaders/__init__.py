"""Which other programs load a checkpoint: `facts` is what they look at, `rules` what each of them takes."""
