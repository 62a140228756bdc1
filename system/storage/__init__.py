"""What is kept on the disk: files that appear all at once, tensors, directories of runs, results kept between runs."""
