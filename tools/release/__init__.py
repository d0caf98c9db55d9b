"""What a release is made of beside the source: checks of the wheel, and the Homebrew formula."""
