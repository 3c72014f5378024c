"""``jaxmem install-compiler``: XLA's compilers for devices that are not there."""

from jaxmem.targets import FAMILIES


def add_install(commands) -> None:
    """Adds the command, with an option for the version of each family's compiler."""
    about = "install XLA's compiler for accelerators that are not in the machine"
    parser = commands.add_parser("install-compiler", help=about, description=about)
    parser.set_defaults(run=_install)
    for family in FAMILIES.values():
        parser.add_argument(
            f"--{family.name}",
            type=int,
            nargs="?",
            const=0,
            metavar="VERSION",
            help=family.versions,
        )


def _install(options) -> int:
    chosen = {name: getattr(options, name) for name in FAMILIES}
    wanted = {name: version for name, version in chosen.items() if version is not None}
    for name, version in (wanted or {next(iter(FAMILIES)): 0}).items():
        family = FAMILIES[name]
        terms = f" ({family.licence})" * bool(family.licence)
        print(f"XLA's compiler for {name}: installing once for this version of jaxlib{terms}")
        folder = family.install(version or None)
        print(f"XLA's compiler for {name} is in {folder}", flush=True)
    return 0
