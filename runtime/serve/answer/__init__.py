"""What a model's text says besides its answer: reasoning and tool calls, in the formats that models are trained on."""
