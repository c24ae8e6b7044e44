# find_package(shardd): target shardd::shd, the client library with its one header, shd.h.
include(${CMAKE_CURRENT_LIST_DIR}/sharddTargets.cmake)
