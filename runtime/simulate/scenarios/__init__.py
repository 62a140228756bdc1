"""What is asked of the simulator: a load, a model, a device, a placement and policies; and how results are shown."""
