# Links LLVM and MLIR statically, and once.
#
# Debian's MLIR archives name the shared libraries `LLVM` and `MLIR` in their
# link interface. A binary that takes both the archives and those libraries
# holds two pass registries and dies at start-up, so the names are dropped from
# every exported target and the LLVM components are given explicitly.

set(LLVM_LINK_LLVM_DYLIB OFF)
set(MLIR_LINK_MLIR_DYLIB OFF)

foreach(target IN LISTS MLIR_EXPORTED_TARGETS)
  if(TARGET ${target})
    get_target_property(deps ${target} INTERFACE_LINK_LIBRARIES)
    if(deps)
      list(FILTER deps EXCLUDE REGEX "^([$]<LINK_ONLY:)?(LLVM|MLIR)>?$")
      set_target_properties(${target} PROPERTIES INTERFACE_LINK_LIBRARIES "${deps}")
    endif()
  endif()
endforeach()

llvm_map_components_to_libnames(COREY_LLVM_LIBS
  core support supportlsp NVPTXCodeGen NVPTXDesc NVPTXInfo X86CodeGen X86AsmParser X86Desc X86Info
  orcjit jitlink passes native)

# corey_add_library(<name> <sources>... [DEPENDS <targets>...] [LINK <libs>...])
#
# A static library of one room. DEPENDS names TableGen targets.
function(corey_add_library name)
  cmake_parse_arguments(ARG "NO_PCH" "" "DEPENDS;LINK" ${ARGN})
  add_library(${name} STATIC ${ARG_UNPARSED_ARGUMENTS})
  if(ARG_DEPENDS)
    add_dependencies(${name} ${ARG_DEPENDS})
  endif()
  target_link_libraries(${name} PUBLIC ${ARG_LINK})
  if(COREY_USE_PCH AND NOT ARG_NO_PCH)
    target_precompile_headers(${name} REUSE_FROM CoreyPCH)
  endif()
endfunction()
