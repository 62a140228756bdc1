"""What commands share: options, processes and how they end."""
