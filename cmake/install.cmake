# Where things go, in four components: shardd (daemon, shardctl, units), libshd0, libshd-dev and
# shd-gpt (the example, apart because of oneDNN). `cmake --install BUILD --prefix P` and cpack use
# the same rules: what depends on the prefix is written when it is known, at installation.

# Debian's multiarch directory under every prefix: /usr/local's is searched as /usr's is.
if(EXISTS /etc/debian_version AND CMAKE_LIBRARY_ARCHITECTURE AND NOT DEFINED CMAKE_INSTALL_LIBDIR)
  set(CMAKE_INSTALL_LIBDIR lib/${CMAKE_LIBRARY_ARCHITECTURE} CACHE PATH "Libraries, under the prefix")
endif()
include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

function(shd_install_program target component)
  install(TARGETS ${target} RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT ${component})
endfunction()

# The library, its header, and its descriptions for pkg-config and find_package().
function(shd_install_library target)
  set(config_dir ${CMAKE_INSTALL_LIBDIR}/cmake/shardd)
  install(TARGETS ${target} EXPORT sharddTargets
          LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT libshd0 NAMELINK_COMPONENT libshd-dev
          PUBLIC_HEADER DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT libshd-dev)
  # find_package(shardd): target shardd::shd, the client library with its one header, shd.h.
  install(EXPORT sharddTargets NAMESPACE shardd:: FILE sharddConfig.cmake DESTINATION ${config_dir}
          COMPONENT libshd-dev)
  write_basic_package_version_file(${PROJECT_BINARY_DIR}/sharddConfigVersion.cmake
                                   COMPATIBILITY SameMinorVersion)
  install(FILES ${PROJECT_BINARY_DIR}/sharddConfigVersion.cmake DESTINATION ${config_dir}
          COMPONENT libshd-dev)
  # From the .pc file up to the prefix, so that an installed tree can be moved.
  file(RELATIVE_PATH SHD_PC_TO_PREFIX /p/${CMAKE_INSTALL_LIBDIR}/pkgconfig /p)
  string(REGEX REPLACE "/$" "" SHD_PC_TO_PREFIX ${SHD_PC_TO_PREFIX})
  configure_file(${PROJECT_SOURCE_DIR}/cmake/libshd.pc.in ${PROJECT_BINARY_DIR}/libshd.pc @ONLY)
  install(FILES ${PROJECT_BINARY_DIR}/libshd.pc
          DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig COMPONENT libshd-dev)
endfunction()

# The Python package, made of what lies in dir, without the library and programs that are beside it there.
# Debian's Python looks there below /usr; elsewhere it is named to PYTHONPATH. In no Debian package.
function(shd_install_python dir)
  install(DIRECTORY ${dir} DESTINATION lib/python3/dist-packages COMPONENT python3-libshd
          FILES_MATCHING PATTERN *.py PATTERN py.typed PATTERN lib EXCLUDE PATTERN bin EXCLUDE
          PATTERN __pycache__ EXCLUDE)
endfunction()

# shd_install_compressed(COMPONENT DIR FILE NAME): as gzip without a time, where there is gzip.
find_program(GZIP_PROGRAM gzip)
function(shd_install_compressed component dir file name)
  cmake_path(ABSOLUTE_PATH file BASE_DIRECTORY ${PROJECT_SOURCE_DIR})
  install(CODE "
    set(source [[${file}]])
    set(name [[${name}]])
    set(dir [[${dir}]])
    set(gzip [[${GZIP_PROGRAM}]])
    set(scratch [[${PROJECT_BINARY_DIR}/install]])
    include([[${PROJECT_SOURCE_DIR}/cmake/install-compressed.cmake]])"
    COMPONENT ${component})
endfunction()

set(man ${CMAKE_INSTALL_MANDIR})
shd_install_compressed(shardd ${man}/man8 docs/man/shardd.8 shardd.8)
shd_install_compressed(shardd ${man}/man1 ${PROJECT_BINARY_DIR}/man/shardctl.1 shardctl.1)
shd_install_compressed(shd-gpt ${man}/man1 docs/man/shd-gpt.1 shd-gpt.1)
shd_install_compressed(libshd-dev ${man}/man3 docs/man/libshd.3 libshd.3)

# Overrides of lintian: instances belong to the target of all daemons, which the operator enables; CPack
# writes calls of ldconfig, and the trigger is there as well.
set(overrides ${PROJECT_BINARY_DIR}/install/overrides)
file(WRITE ${overrides}/shardd
     "shardd: systemd-service-file-refers-to-unusual-wantedby-target shardd.target *\n")
file(WRITE ${overrides}/libshd0 "libshd0: maintscript-calls-ldconfig *\n")
foreach(package shardd libshd0)
  install(FILES ${overrides}/${package} DESTINATION ${CMAKE_INSTALL_DATADIR}/lintian/overrides
          COMPONENT ${package})
endforeach()
foreach(package shardd libshd0 libshd-dev shd-gpt)
  set(doc ${CMAKE_INSTALL_DATADIR}/doc/${package})
  shd_install_compressed(${package} ${doc} cmake/debian/changelog changelog)
  install(FILES cmake/debian/copyright DESTINATION ${doc} COMPONENT ${package})
endforeach()

set(doc ${CMAKE_INSTALL_DATADIR}/doc/shardd)
install(FILES README.md DESTINATION ${doc} COMPONENT shardd)
install(DIRECTORY docs/ DESTINATION ${doc}/docs COMPONENT shardd FILES_MATCHING PATTERN *.md PATTERN *.png
        PATTERN *.yml PATTERN grafana/shardd.json PATTERN man EXCLUDE)
install(FILES systemd/cpu0.conf systemd/gpu.conf systemd/checkpoints.conf
        DESTINATION ${doc}/examples COMPONENT shardd)
install(FILES examples/minimal.c DESTINATION ${CMAKE_INSTALL_DATADIR}/doc/libshd-dev/examples
        COMPONENT libshd-dev)
install(FILES examples/pytorch/gpt.py examples/pytorch/finetune.py DESTINATION ${CMAKE_INSTALL_DATADIR}/doc/python3-libshd/examples
        COMPONENT python3-libshd)
install(DIRECTORY examples/gpt DESTINATION ${CMAKE_INSTALL_DATADIR}/doc/libshd-dev/examples
        COMPONENT libshd-dev FILES_MATCHING PATTERN *.[ch])

# systemd's files. The unit and its settings name absolute paths.
install(FILES systemd/shardd.target DESTINATION lib/systemd/system COMPONENT shardd)
install(FILES systemd/shardd.sysusers.conf DESTINATION lib/sysusers.d RENAME shardd.conf
        COMPONENT shardd)
install(FILES systemd/shardd.tmpfiles.conf DESTINATION lib/tmpfiles.d RENAME shardd.conf
        COMPONENT shardd)
install(CODE "
  set(source_dir [[${PROJECT_SOURCE_DIR}/systemd]])
  set(scratch [[${PROJECT_BINARY_DIR}/install]])
  set(bindir [[${CMAKE_INSTALL_BINDIR}]])
  include([[${PROJECT_SOURCE_DIR}/cmake/install-unit.cmake]])"
  COMPONENT shardd)

# Completion and the flags in the manual page are shardctl's own words about itself.
set(manual ${PROJECT_BINARY_DIR}/man/shardctl.1)
add_custom_command(OUTPUT ${manual}
  COMMAND ${CMAKE_COMMAND} -D SHARDCTL=$<TARGET_FILE:shardctl>
          -D IN=${PROJECT_SOURCE_DIR}/docs/man/shardctl.1.in -D OUT=${manual}
          -P ${PROJECT_SOURCE_DIR}/cmake/manual.cmake
  DEPENDS shardctl docs/man/shardctl.1.in cmake/manual.cmake VERBATIM)
set(completion ${PROJECT_BINARY_DIR}/completion)
add_custom_command(OUTPUT ${completion}/shardctl.bash ${completion}/shardctl.zsh
  COMMAND ${CMAKE_COMMAND} -E make_directory ${completion}
  COMMAND shardctl completion bash > ${completion}/shardctl.bash
  COMMAND shardctl completion zsh > ${completion}/shardctl.zsh
  DEPENDS shardctl VERBATIM)
add_custom_target(shardctl-texts ALL DEPENDS ${manual} ${completion}/shardctl.bash ${completion}/shardctl.zsh)
install(FILES ${completion}/shardctl.bash RENAME shardctl COMPONENT shardd
        DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions)
install(FILES ${completion}/shardctl.zsh RENAME _shardctl COMPONENT shardd
        DESTINATION ${CMAKE_INSTALL_DATADIR}/zsh/vendor-completions)
