"""What the options of each launcher mean. One table per launcher serves to read and to write options."""
