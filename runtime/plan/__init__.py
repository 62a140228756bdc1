"""What a model does on a device in each format, and which compression meets a target. Only `measured` touches a tensor."""
