# Debian packages: `cpack --config BUILD/CPackConfig.cmake` (generator DEB). One for each component
# of install.cmake, so that a host with daemons needs no oneDNN and a container of workers no daemon.
find_program(DPKG_PROGRAM dpkg)
if(NOT DPKG_PROGRAM)
  return()
endif()
set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_NAME shardd)
set(CPACK_PACKAGE_CONTACT "shardd maintainers <maintainers@users.noreply.github.com>")
set(CPACK_PACKAGE_VENDOR shardd)
# CPack's own default: any other text would go before the synopsis of every package.
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "${CMAKE_PROJECT_NAME} built using CMake")
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_STRIP_FILES ON)
set(CPACK_COMPONENTS_ALL shardd libshd0 libshd-dev shd-gpt)
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_INSTALL_DEFAULT_DIRECTORY_PERMISSIONS OWNER_READ OWNER_WRITE OWNER_EXECUTE GROUP_READ
    GROUP_EXECUTE WORLD_READ WORLD_EXECUTE) # whatever the umask of who builds

set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_CONTROL_STRICT_PERMISSION ON)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS_PRIVATE_DIRS ${CMAKE_LIBRARY_OUTPUT_DIRECTORY})
set(CPACK_DEBIAN_PACKAGE_GENERATE_SHLIBS ON)
set(same "(= ${PROJECT_VERSION})")

set(debian ${PROJECT_SOURCE_DIR}/cmake/debian)
set(control ${PROJECT_BINARY_DIR}/install/control)
file(WRITE ${control}/conffiles "/etc/default/shardd\n")
file(WRITE ${control}/triggers "activate-noawait ldconfig\n")

set(CPACK_DEBIAN_SHARDD_PACKAGE_NAME shardd)
set(CPACK_DEBIAN_SHARDD_PACKAGE_SECTION science)
set(CPACK_DEBIAN_SHARDD_PACKAGE_DEPENDS
    "passwd, systemd | systemd-standalone-sysusers")
# libucx0 is loaded where a cluster file has bulk "ucx".
set(CPACK_DEBIAN_SHARDD_PACKAGE_SUGGESTS "shd-gpt, libucx0")
set(CPACK_DEBIAN_SHARDD_PACKAGE_CONTROL_EXTRA
    ${control}/conffiles ${debian}/postinst ${debian}/prerm ${debian}/postrm)
set(CPACK_DEBIAN_SHARDD_DESCRIPTION
"training state as a service: daemon and tools
Parameters and optimizer state of a model live in small daemons, one for each
device, that outlive every training process. Workers are stateless: they
attach, read the units a layer needs in place, and return gradients. They may
die, be replaced or change in number; nothing is lost and no bit differs.
.
This package has the daemon with its systemd units, and shardctl, which starts,
shows and checks daemons.")

set(CPACK_DEBIAN_LIBSHD0_PACKAGE_NAME libshd0)
set(CPACK_DEBIAN_LIBSHD0_PACKAGE_SECTION libs)
# Loaded for an arbiter that is an etcd; Ubuntu 24.04 has it under the second name.
set(CPACK_DEBIAN_LIBSHD0_PACKAGE_SUGGESTS "libcurl4 | libcurl4t64")
set(CPACK_DEBIAN_LIBSHD0_PACKAGE_CONTROL_EXTRA ${control}/triggers)
set(CPACK_DEBIAN_LIBSHD0_DESCRIPTION
"training state as a service: client library
Attach to shardd daemons, read parameters in place, return gradients, commit
steps. The same program runs without a daemon in one process.")

set(CPACK_DEBIAN_LIBSHD-DEV_PACKAGE_NAME libshd-dev)
set(CPACK_DEBIAN_LIBSHD-DEV_PACKAGE_SECTION libdevel)
set(CPACK_DEBIAN_LIBSHD-DEV_PACKAGE_DEPENDS "libshd0 ${same}")
set(CPACK_DEBIAN_LIBSHD-DEV_DESCRIPTION
"training state as a service: development files
The header of libshd, its descriptions for pkg-config and CMake, and the
sources of an example worker.")

set(CPACK_DEBIAN_SHD-GPT_PACKAGE_NAME shd-gpt)
set(CPACK_DEBIAN_SHD-GPT_PACKAGE_SECTION science)
set(CPACK_DEBIAN_SHD-GPT_PACKAGE_DEPENDS "libshd0 ${same}")
set(CPACK_DEBIAN_SHD-GPT_PACKAGE_RECOMMENDS fortunes)
set(CPACK_DEBIAN_SHD-GPT_PACKAGE_SUGGESTS shardd)
set(CPACK_DEBIAN_SHD-GPT_DESCRIPTION
"training state as a service: example worker
A byte-level GPT in C that trains on any text, with its parameters in shardd
daemons or in its own process, to the same bits.")
include(CPack)
