# Install ${source} as ${dir}/${name}.gz under the prefix; plain where there is no gzip.
file(MAKE_DIRECTORY ${scratch})
if(gzip)
  set(made ${scratch}/${name}.gz)
  execute_process(COMMAND ${gzip} -9nc ${source} OUTPUT_FILE ${made} COMMAND_ERROR_IS_FATAL ANY)
else()
  set(made ${scratch}/${name})
  configure_file(${source} ${made} COPYONLY)
endif()
file(INSTALL ${made} DESTINATION ${CMAKE_INSTALL_PREFIX}/${dir} PERMISSIONS
     OWNER_READ OWNER_WRITE GROUP_READ WORLD_READ)
