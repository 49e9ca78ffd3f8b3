"""From sampled output lengths to one length distribution for each prompt."""
