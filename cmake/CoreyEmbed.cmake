# corey_embed_files(<output> <files>...)
#
# Writes a list of `{"<name>", <text>},` for #include: files that become part of
# a binary.
function(corey_embed_files output)
  set(list "")
  foreach(path IN LISTS ARGN)
    get_filename_component(name ${path} NAME)
    file(READ ${path} text)
    if(NOT CMAKE_SCRIPT_MODE_FILE)
      set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${path})
    endif()
    # A string literal may not be longer than 64 KiB everywhere: pieces.
    string(LENGTH "${text}" length)
    set(pieces "")
    set(begin 0)
    while(begin LESS length)
      string(SUBSTRING "${text}" ${begin} 8000 piece)
      string(APPEND pieces "R\"json(${piece})json\"\n")
      math(EXPR begin "${begin} + 8000")
    endwhile()
    string(APPEND list "{\"${name}\",\n${pieces}},\n")
  endforeach()
  file(CONFIGURE OUTPUT ${output} CONTENT "${list}" @ONLY)
endfunction()

# Of files that the build makes:
#   cmake -DOUTPUT=<output> -DFILES=<files> -P CoreyEmbed.cmake
if(CMAKE_SCRIPT_MODE_FILE)
  corey_embed_files(${OUTPUT} ${FILES})
endif()
