"""Base classes of recipe sections: their fields, choices and variants."""
