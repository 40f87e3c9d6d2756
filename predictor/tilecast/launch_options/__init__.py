"""Meanings of each launcher's options. One table per launcher serves to read and to write options."""
