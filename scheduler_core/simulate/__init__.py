"""What the sub-commands of `simulate` do; each module is one of them."""
