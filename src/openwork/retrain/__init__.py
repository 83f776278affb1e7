"""What a config means for the groups of a model, whatever its framework: settings, choice, records, the search."""
