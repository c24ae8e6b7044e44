# What a compiler and a linker can do against an overflow of a buffer, as Debian's packages have it; held by
# ctest hardening. Generated code links shd_hardening, too; code of ours has it by shd_options.
#
# Sanitized builds are without what the sanitizers find themselves, and builds for debugging without
# _FORTIFY_SOURCE, which needs the optimizer.
include(CheckPIESupported)
include(CheckCCompilerFlag)
include(CheckLinkerFlag)
check_pie_supported(LANGUAGES C) # CMAKE_POSITION_INDEPENDENT_CODE links programs as PIE only after this
# A start of a sanitized PIE writes 200,000 addresses into the tables of its checks: a fifth of that of `shardctl --version`.
if(SHD_SANITIZE)
  set(CMAKE_C_LINK_OPTIONS_PIE -no-pie)
endif()

add_library(shd_hardening INTERFACE)
target_link_options(shd_hardening INTERFACE -Wl,-z,relro,-z,now,-z,noexecstack)
set(shd_hardened OFF)
if(SHD_HARDENING AND NOT SHD_SANITIZE AND NOT CMAKE_BUILD_TYPE STREQUAL Debug)
  set(shd_hardened ON)
  foreach(flag -fstack-protector-strong -fstack-clash-protection -fcf-protection=full)
    string(MAKE_C_IDENTIFIER SHD_HAS${flag} has)
    check_c_compiler_flag(${flag} ${has})
    if(${has})
      target_compile_options(shd_hardening INTERFACE ${flag})
    endif()
  endforeach()
  target_compile_options(shd_hardening INTERFACE -Wformat -Werror=format-security -U_FORTIFY_SOURCE -D_FORTIFY_SOURCE=3)
  # crt1.o and crti.o of Debian 12 carry no CET note, which would take it from every program: by force.
  # They begin nothing but _start, _init and _fini.
  check_linker_flag(C -Wl,-z,ibt,-z,shstk SHD_HAS_CET_NOTE)
  if(SHD_HAS_CET_NOTE)
    target_link_options(shd_hardening INTERFACE -Wl,-z,ibt,-z,shstk)
  endif()
endif()
