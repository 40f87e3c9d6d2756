"""Meanings of each launcher's options. Each launcher has one table, by which its options are read and written."""
