"""``jaxmem install-compiler``: XLA's compiler for devices that are not there."""

from jaxmem.targets import install_compiler


def add_install(commands) -> None:
    about = "install XLA's compiler for GPUs that are not in the machine"
    parser = commands.add_parser("install-compiler", help=about, description=about)
    parser.set_defaults(run=_install)
    parser.add_argument("--cuda", type=int, default=13, help="13, or 12 for V100 (default: 13)")


def _install(options) -> int:
    print("XLA's GPU compiler: installing once for this version of jaxlib", flush=True)
    print(f"XLA's GPU compiler is in {install_compiler(options.cuda)}")
    return 0
