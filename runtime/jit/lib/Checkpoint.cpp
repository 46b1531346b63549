//===- Checkpoint.cpp - Folders of pretrained models ----------------------===//
//
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
//===----------------------------------------------------------------------===//

#include "corey/Checkpoint.h"
#include "llvm/ADT/STLExtras.h"
#include "llvm/Support/FileSystem.h"
#include "llvm/Support/JSON.h"
#include "llvm/Support/MemoryBuffer.h"
#include "llvm/Support/Path.h"
#include <map>

using namespace corey;

static std::string pathIn(llvm::StringRef folder, llvm::StringRef name) {
  llvm::SmallString<256> path(folder);
  llvm::sys::path::append(path, name);
  return path.str().str();
}

static Expected<std::string> readText(const std::string &path) {
  auto buffer = llvm::MemoryBuffer::getFile(path, /*IsText=*/true);
  if (buffer)
    return (*buffer)->getBuffer().str();
  std::string message = path + ": " + buffer.getError().message();
  return buffer.getError() == std::errc::no_such_file_or_directory
             ? Status::notFound(message)
             : Status::ioError(message);
}

/// The file that each tensor is in, as an index says.
static Expected<std::map<std::string, std::string>>
readIndex(const std::string &path) {
  Expected<std::string> text = readText(path);
  if (!text)
    return text.takeStatus();
  llvm::Expected<llvm::json::Value> parsed = llvm::json::parse(*text);
  if (!parsed)
    return Status::invalidArgument(path + ": expected JSON, got " +
                                   llvm::toString(parsed.takeError()));
  const llvm::json::Object *object = parsed->getAsObject();
  const llvm::json::Object *map =
      object ? object->getObject("weight_map") : nullptr;
  if (!map)
    return Status::invalidArgument(
        path + ": weight_map: expected an object, got none");
  std::map<std::string, std::string> files;
  for (const auto &[name, value] : *map) {
    auto file = value.getAsString();
    // Files of the folder only.
    if (!file || file->empty() || llvm::sys::path::filename(*file) != *file)
      return Status::invalidArgument(path + ": weight_map: " + name.str() +
                                     ": expected the name of a file of the "
                                     "folder, got " +
                                     (file ? "'" + file->str() + "'" : "none"));
    files[name.str()] = file->str();
  }
  return files;
}

Expected<Checkpoint> Checkpoint::open(const std::string &folder) {
  if (!llvm::sys::fs::is_directory(folder))
    return Status::notFound("expected a folder, got '" + folder + "'");
  Checkpoint checkpoint;
  checkpoint.folder = folder;
  std::string configPath = pathIn(folder, "config.json");
  Expected<std::string> text = readText(configPath);
  if (!text)
    return text.takeStatus();
  Expected<import::ModelConfig> config =
      import::parseModelConfig(*text, configPath);
  if (!config)
    return config.takeStatus();
  checkpoint.description = *config;
  std::string generationPath = pathIn(folder, "generation_config.json");
  if (llvm::sys::fs::exists(generationPath)) {
    text = readText(generationPath);
    if (!text)
      return text.takeStatus();
    if (Status status = import::readGenerationConfig(*text, generationPath,
                                                     checkpoint.description);
        !status)
      return status;
  }

  std::map<std::string, std::string> wanted;
  std::vector<std::string> names{"model.safetensors"};
  std::string indexPath = pathIn(folder, "model.safetensors.index.json");
  if (!llvm::sys::fs::exists(pathIn(folder, names[0]))) {
    if (!llvm::sys::fs::exists(indexPath))
      return Status::notFound(
          folder +
          ": expected model.safetensors or "
          "model.safetensors.index.json, got neither" +
          (llvm::sys::fs::exists(pathIn(folder, "pytorch_model.bin"))
               ? " (pytorch_model.bin has to be converted)"
               : ""));
    Expected<std::map<std::string, std::string>> index = readIndex(indexPath);
    if (!index)
      return index.takeStatus();
    wanted = std::move(*index);
    names.clear();
    for (const auto &[tensor, file] : wanted)
      names.push_back(file);
    llvm::sort(names);
    names.erase(std::unique(names.begin(), names.end()), names.end());
  }
  for (const std::string &name : names) {
    Expected<SafeTensors> file = SafeTensors::open(pathIn(folder, name));
    if (!file)
      return file.takeStatus();
    for (const std::string &tensor : file->names()) {
      auto at = wanted.find(tensor);
      if (!wanted.empty() && (at == wanted.end() || at->second != name))
        return Status::invalidArgument(
            indexPath + ": weight_map: " + tensor + ": expected '" + name +
            "', which has it, got " +
            (at == wanted.end() ? "none" : "'" + at->second + "'"));
      Expected<Tensor> view = file->get(tensor);
      if (!view)
        return view.takeStatus();
      checkpoint.index[tensor] = {view->dtype(), view->shape()};
      checkpoint.shardOf[tensor] = checkpoint.shards.size();
    }
    checkpoint.shards.push_back(std::move(*file));
  }
  for (const auto &[tensor, file] : wanted)
    if (!checkpoint.shardOf.contains(tensor))
      return Status::notFound(indexPath + ": weight_map: " + tensor +
                              ": expected it in '" + file +
                              "', got a file without it");
  return checkpoint;
}

Expected<Tensor> Checkpoint::get(std::string_view name) const {
  auto at = shardOf.find(name);
  if (at == shardOf.end())
    return Status::notFound(folder + ": expected tensor '" + std::string(name) +
                            "', got none");
  return shards[at->second].get(name);
}
