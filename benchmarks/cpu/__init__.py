"""The runtime on a CPU: its kernels, and generating beside other runtimes."""
