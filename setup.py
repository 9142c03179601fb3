"""Maps the top-level conf/ and recipes/ into the package; everything else is in pyproject.toml."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["gpipe_cli", "gpipe_cli.*"]), "gpipe_cli.conf", "gpipe_cli.recipes"],
    package_dir={"gpipe_cli.conf": "conf", "gpipe_cli.recipes": "recipes"},
    package_data={
        "gpipe_cli": ["py.typed", "completion.bash", "completion.fish", "completion.zsh", "overview.txt"],
        "gpipe_cli.config": ["keys.ini"],
        "gpipe_cli.launch": ["*.sh"],
        "gpipe_cli.report.page": ["*.css", "*.js", "templates/*.html"],
        "gpipe_cli.conf": ["**/*.yaml"],
        "gpipe_cli.recipes": ["*.yaml", "small/*.yaml"],
        "gpipe_cli.data": ["files/*"],
    },
)
