"""What this machine has and lets this process use: devices, cores, memory."""
