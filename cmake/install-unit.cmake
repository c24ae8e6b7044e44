# Install the unit with this prefix's paths in it, and the settings file it reads. Under /usr and
# /usr/local settings are in /etc, under another prefix in its own etc.
set(SHD_BINDIR ${CMAKE_INSTALL_PREFIX}/${bindir})
if(CMAKE_INSTALL_PREFIX MATCHES "^/usr(/local)?/?$")
  set(SHD_SYSCONFDIR /etc)
else()
  set(SHD_SYSCONFDIR ${CMAKE_INSTALL_PREFIX}/etc)
endif()
set(unit ${scratch}/shardd@.service)
configure_file(${source_dir}/shardd@.service ${unit} @ONLY)
file(INSTALL ${unit} DESTINATION ${CMAKE_INSTALL_PREFIX}/lib/systemd/system)

# A settings file that the operator may have changed stays.
if(NOT EXISTS $ENV{DESTDIR}${SHD_SYSCONFDIR}/default/shardd)
  file(INSTALL ${source_dir}/shardd.default DESTINATION ${SHD_SYSCONFDIR}/default RENAME shardd)
endif()
file(INSTALL DESTINATION ${SHD_SYSCONFDIR}/shardd TYPE DIRECTORY FILES "")
