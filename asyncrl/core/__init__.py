"""Code that all packages share: types, errors, protocols, the recorder. Importing it loads neither torch nor ray."""
