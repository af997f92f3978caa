"""Code that all packages share: types, errors, protocols, a profile. Importing it does not load torch or ray."""
