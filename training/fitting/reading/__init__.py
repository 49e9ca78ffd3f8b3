"""Answer lengths from files of any format and size to groups in memory."""
