"""Which other programs load a checkpoint: `facts` is what they check, `rules` what each of them supports."""
