"""The vocabulary of the system: types, errors, ports and records. Importing it loads neither torch nor ray."""
