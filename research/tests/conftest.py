"""Make the fixtures of the package's tests available to the tests of the studies."""

from fixtures import image_folder, no_pictures, process_state  # noqa: F401
