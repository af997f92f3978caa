"""The vocabulary of the system: types, errors and ports. Importing it loads neither torch nor ray."""
