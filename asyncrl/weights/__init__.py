"""The transfer of policy versions to the engines: manifests, carriers of the bytes, and verification."""
