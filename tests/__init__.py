"""The tests are a package of this name, since an installed library may bring a `tests`, too."""
