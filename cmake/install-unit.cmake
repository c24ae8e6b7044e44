# Install the units with this prefix's paths in them, and the settings file they read. Under /usr and
# /usr/local settings are in /etc, under another prefix in its own etc.
set(SHD_BINDIR ${CMAKE_INSTALL_PREFIX}/${bindir})
if(CMAKE_INSTALL_PREFIX MATCHES "^/usr(/local)?/?$")
  set(SHD_SYSCONFDIR /etc)
else()
  set(SHD_SYSCONFDIR ${CMAKE_INSTALL_PREFIX}/etc)
endif()
foreach(unit shardd@.service shardd-exporter.service shardd-relay.service)
  configure_file(${source_dir}/${unit} ${scratch}/${unit} @ONLY)
  file(INSTALL ${scratch}/${unit} DESTINATION ${CMAKE_INSTALL_PREFIX}/lib/systemd/system)
endforeach()

# A settings file that the operator may have changed stays.
if(NOT EXISTS $ENV{DESTDIR}${SHD_SYSCONFDIR}/default/shardd)
  file(INSTALL ${source_dir}/shardd.default DESTINATION ${SHD_SYSCONFDIR}/default RENAME shardd)
endif()
file(INSTALL DESTINATION ${SHD_SYSCONFDIR}/shardd TYPE DIRECTORY FILES "")
