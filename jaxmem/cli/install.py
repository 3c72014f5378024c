"""``jaxmem install-compiler``: XLA's compilers for devices that are not there."""

from jaxmem.targets import FAMILIES


def add_install(commands) -> None:
    """Adds the command, with an option for the version of each family's compiler."""
    about = "install XLA's compiler for accelerators that are not in the machine"
    parser = commands.add_parser("install-compiler", help=about, description=about)
    parser.set_defaults(run=_install)
    for family in FAMILIES.values():
        parser.add_argument(f"--{family.name}", type=int, help=family.versions)


def _install(options) -> int:
    chosen = {name: getattr(options, name) for name in FAMILIES}
    if not any(chosen.values()):
        chosen = {next(iter(FAMILIES)): None}
    for name, version in chosen.items():
        if version is not None or len(chosen) == 1:
            print(f"XLA's compiler for {name}: installing once for this version of jaxlib")
            print(f"XLA's compiler for {name} is in {FAMILIES[name].install(version)}", flush=True)
    return 0
