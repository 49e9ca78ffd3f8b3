"""The paper's three studies of length distributions (TIE: table 1, figures 8 and 7), on any file of sampled answers."""
