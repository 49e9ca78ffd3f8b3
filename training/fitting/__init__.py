"""From sampled answer lengths to one length distribution for each prompt."""
